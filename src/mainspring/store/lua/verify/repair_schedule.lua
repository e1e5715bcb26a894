-- Remove the chain of a schedule that does not exist.
--
-- KEYS  sched, next
-- ARGV  name
-- returns 1 if it was removed, 0 if there is such a schedule (by now)
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 0 end
return redis.call('HDEL', KEYS[2], ARGV[1])
