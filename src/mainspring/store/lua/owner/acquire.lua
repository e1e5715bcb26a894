-- Become the owner of a partition.
--
-- KEYS  own, fence
-- ARGV  owner, nonce, lease in ms, ms for which the partition must have been without an owner (0 = none)
-- returns {time in us, 'ok', token} or {time in us, 'busy', owner, ms left}
-- keeps: epochs only grow, even after a failover that forgot some; a lease end further ahead than one lease (the
--   clock of a promoted server lags) is clamped for good, so a partition is never locked for longer than one lease.
local now = now_us()
local now_ms = math.floor(now / 1000)
local lease = tonumber(ARGV[3])
local stored = redis.call('HMGET', KEYS[1], 'owner', 'lease_end_ms', 'epoch', 'lease_ms')
local lease_end = tonumber(stored[2]) or 0
local furthest = now_ms + (tonumber(stored[4]) or lease)
if lease_end > furthest then
  lease_end = furthest
  redis.call('HSET', KEYS[1], 'lease_end_ms', string.format('%.0f', lease_end))
end
local free_at = lease_end + tonumber(ARGV[4])
if free_at > now_ms and stored[1] ~= ARGV[1] then return {now, 'busy', stored[1] or '', free_at - now_ms} end
local epoch = string.format('%.0f', math.max((tonumber(stored[3]) or 0) + 1, now))
local token = epoch .. '.' .. ARGV[2]
redis.call('HSET', KEYS[1], 'epoch', epoch, 'token', token, 'owner', ARGV[1], 'lease_ms', ARGV[3],
  'lease_end_ms', string.format('%.0f', now_ms + lease))
redis.call('SET', KEYS[2], token .. ':0')
return {now, 'ok', token}
