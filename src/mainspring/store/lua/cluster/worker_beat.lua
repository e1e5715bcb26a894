-- Heartbeat of a worker: renew its lease, and remove some workers whose lease has expired.
--
-- KEYS  workers, workers:t
-- ARGV  key of the worker, lease in ms, record
-- returns the end of its lease in ms
-- keeps: a worker is in both keys or in neither. Sent twice, it only lengthens the lease.
local now_ms = math.floor(now_us() / 1000)
local lease_end = string.format('%.0f', now_ms + tonumber(ARGV[2]))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[2], lease_end, ARGV[1])
local gone = redis.call('ZRANGE', KEYS[2], '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, 100)
for _, key in ipairs(gone) do
  redis.call('HDEL', KEYS[1], key)
  redis.call('ZREM', KEYS[2], key)
end
return lease_end
