-- Remove a worker that has stopped, so that its lease need not run out.
--
-- KEYS  workers, workers:t
-- ARGV  key of the worker
-- returns 1 when it was in the list, else 0
redis.call('HDEL', KEYS[1], ARGV[1])
return redis.call('ZREM', KEYS[2], ARGV[1])
