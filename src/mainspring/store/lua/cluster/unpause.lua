-- Remove a pause that is over by its time.
--
-- KEYS  pauses
-- ARGV  what was paused, its record as it was read
-- returns 1 when it was removed, 0 when it is another one by now
-- keeps: a pause that somebody has just prolonged is not removed.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
