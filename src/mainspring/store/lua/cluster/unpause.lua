-- Remove a pause whose time is over.
--
-- KEYS  pauses
-- ARGV  what is paused, its record as it was read
-- returns 1 if it was removed, 0 if it has another record by now
-- keeps: a pause that was just prolonged is not removed.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
