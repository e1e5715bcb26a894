-- Renew the leases of any number of partitions of one server.
--
-- KEYS  own of each partition
-- ARGV  lease in ms, then the token of each
-- returns {time in us, 'ok' | 'fenced' per partition}
local now = now_us()
local out = {now}
local lease_end = string.format('%.0f', math.floor(now / 1000) + tonumber(ARGV[1]))
for i, own in ipairs(KEYS) do
  if redis.call('HGET', own, 'token') == ARGV[i + 1] then
    redis.call('HSET', own, 'lease_end_ms', lease_end)
    out[i + 1] = 'ok'
  else
    out[i + 1] = 'fenced'
  end
end
return out
