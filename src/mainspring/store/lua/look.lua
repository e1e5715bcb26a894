-- Look at one entry, all of it at one moment.
--
-- KEYS  slices, s, f, d, x, dead:t
-- ARGV  name, index, idh
-- returns {score of its slice, entry, fired, done, cancelled, time of its dead letter}
-- A transaction would do, but a full server refuses even one that only reads.
return {
  redis.call('ZSCORE', KEYS[1], ARGV[1]),
  redis.call('LINDEX', KEYS[2], ARGV[2]),
  redis.call('GETBIT', KEYS[3], ARGV[2]),
  redis.call('GETBIT', KEYS[4], ARGV[2]),
  redis.call('GETBIT', KEYS[5], ARGV[2]),
  redis.call('ZSCORE', KEYS[6], ARGV[3]),
}
