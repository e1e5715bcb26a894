-- Release a partition at once. Without a fence, late writes of this owner are refused like anyone else's.
--
-- KEYS  own, fence
-- ARGV  token; or '.<nonce>', the end of a token, for an acquire whose answer was lost
-- returns {time in us, 'ok' | 'fenced'}
local now = now_us()
local token = redis.call('HGET', KEYS[1], 'token')
if string.sub(ARGV[1], 1, 1) == '.' then token = string.sub(token or '', -#ARGV[1]) end
if token ~= ARGV[1] then return {now, 'fenced'} end
redis.call('HSET', KEYS[1], 'lease_end_ms', string.format('%.0f', math.floor(now / 1000)), 'token', '', 'owner', '')
redis.call('DEL', KEYS[2])
return {now, 'ok'}
