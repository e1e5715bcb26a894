-- Claim due tasks: the hand-written design that `bench baseline` measures.
--
-- KEYS  due (sorted set: id -> due ms), leased (sorted set: id -> lease end ms), entries (hash: id -> entry)
-- ARGV  limit, lease in ms
-- returns {ids, entries}, the earliest first
-- keeps: no task is claimed before its time by the server's clock, and none by two callers at once.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms, 'LIMIT', 0, ARGV[1])
if #ids == 0 then return {ids, ids} end
local entries = redis.call('HMGET', KEYS[3], unpack(ids))
redis.call('ZREM', KEYS[1], unpack(ids))
local leases, lease_end = {}, now_ms + ARGV[2]
for i = 1, #ids do
  leases[2 * i - 1], leases[2 * i] = lease_end, ids[i]
end
redis.call('ZADD', KEYS[2], unpack(leases))
return {ids, entries}
