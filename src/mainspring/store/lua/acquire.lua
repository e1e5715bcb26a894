-- Become the owner of a partition.
--
-- KEYS  own
-- ARGV  owner, nonce, lease in ms
-- returns {time in us, 'ok', token} or {time in us, 'busy', owner, ms left}
-- keeps: epochs only grow, also after a failover that forgot some; a lease end further ahead than one lease (the
--   clock of a promoted server lags) is clamped, so a partition is never locked for longer than one lease.
local now = now_us()
local lease = tonumber(ARGV[3])
local stored = redis.call('HMGET', KEYS[1], 'owner', 'lease_end_ms', 'epoch')
local left = math.min((tonumber(stored[2]) or 0) - now / 1000, lease)
if left > 0 and stored[1] ~= ARGV[1] then return {now, 'busy', stored[1], math.ceil(left)} end
local epoch = string.format('%.0f', math.max((tonumber(stored[3]) or 0) + 1, now))
local token = epoch .. '.' .. ARGV[2]
redis.call('HSET', KEYS[1], 'epoch', epoch, 'token', token, 'owner', ARGV[1], 'seq', 0,
  'lease_end_ms', string.format('%.0f', math.floor(now / 1000) + lease))
return {now, 'ok', token}
