-- Write or remove the pointer, in the partition of a schedule's name, to the partition of its lane, where it is stored.
--
-- KEYS  sched
-- ARGV  name, expected value ('' = none), new value ('' = none)
-- returns 1, or 0 if there is another value by now
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
return 1
