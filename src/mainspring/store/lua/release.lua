-- Give a partition back at once; the token stays behind so that late writes of this owner are still refused.
--
-- KEYS  own
-- ARGV  token
-- returns {time in us, 'ok' | 'fenced'}
local now = now_us()
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return {now, 'fenced'} end
redis.call('HSET', KEYS[1], 'lease_end_ms', 0, 'token', '')
return {now, 'ok'}
