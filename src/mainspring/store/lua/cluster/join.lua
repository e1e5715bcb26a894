-- Register a node. The order of registration decides who leads: the first, then the next oldest.
--
-- KEYS  nodes, beats, meta
-- ARGV  id, nonce, lease in ms, record
-- returns {time in us, 'ok', order} or {time in us, 'taken', ms until its lease ends, its record}
-- keeps: one live node per id; a repeated call of the same process (same nonce) changes nothing. A lease end that
--   lies further ahead than one lease (the clock of a promoted server lags) is clamped, as with partitions.
local now = now_us()
local now_ms = math.floor(now / 1000)
local there = member(redis.call('HGET', KEYS[1], ARGV[1]))
local lease_end = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or 0)
if there and lease_end > now_ms then
  if there.nonce == ARGV[2] then return {now, 'ok', there.order} end
  if lease_end > now_ms + there.lease then
    lease_end = now_ms + there.lease
    redis.call('ZADD', KEYS[2], string.format('%.0f', lease_end), ARGV[1])
  end
  return {now, 'taken', lease_end - now_ms, there.record}
end
local order = redis.call('HINCRBY', KEYS[3], 'joined', 1)
redis.call('HSET', KEYS[1], ARGV[1], order .. ':' .. ARGV[2] .. ':' .. ARGV[3] .. ':0:' .. ARGV[4])
redis.call('ZADD', KEYS[2], string.format('%.0f', now_ms + tonumber(ARGV[3])), ARGV[1])
return {now, 'ok', order}
