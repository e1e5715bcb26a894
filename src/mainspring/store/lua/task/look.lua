-- Read one entry and its state, all at the same moment.
--
-- KEYS  slices, s, f, d, x, dead:t
-- ARGV  name, index, idh
-- returns {score of its slice, entry, fired, done, cancelled, time of its dead letter}
-- A put that was sent again is in its slice more than once: then read the first copy, or the mark that it left.
-- A transaction would do, but a full server refuses even one that only reads.
local s, index = KEYS[2], tonumber(ARGV[2])
local row = redis.call('LINDEX', s, index)
if row and #row > 21 and is_resent(row) and math.floor(string.byte(row, 5) / 8) % 2 == 0 then
  index = first_copy(s, row, index)
  row = redis.call('EXISTS', KEYS[3]) == 1 and mark_of(s, string.sub(row, 6, 21)) or row
end
return {
  redis.call('ZSCORE', KEYS[1], ARGV[1]),
  row,
  redis.call('GETBIT', KEYS[3], index),
  redis.call('GETBIT', KEYS[4], index),
  redis.call('GETBIT', KEYS[5], index),
  redis.call('ZSCORE', KEYS[6], ARGV[3]),
}
