-- Say, in the partition of its name, that a schedule with a lane lives in the partition of the lane; or stop saying so.
--
-- KEYS  sched
-- ARGV  name, what stands there ('' = nothing), what shall stand there ('' = nothing)
-- returns 1, or 0 when something else stands there by now
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
return 1
