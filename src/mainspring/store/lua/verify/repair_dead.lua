-- Give a dead letter its time, or remove a time that has no record.
--
-- KEYS  dead, dead:t
-- ARGV  idh, time in ms
-- returns 'changed' (nothing is wrong by now), 'dated' or 'removed'
-- keeps: a record is never removed.
local there = redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1
local time = redis.call('ZSCORE', KEYS[2], ARGV[1])
if there and not time then
  redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
  return 'dated'
end
if time and not there then
  redis.call('ZREM', KEYS[2], ARGV[1])
  return 'removed'
end
return 'changed'
