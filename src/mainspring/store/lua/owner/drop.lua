-- Drop a slice whose entries are all done.
--
-- KEYS  own, slices, s, f, d, x, holds
-- ARGV  token, name, g, end of the slice in ms (0 = any time), and for a hold slice: the record to keep ('' = none)
-- returns {time in us, status}; status: ok | fenced | stale (another incarnation) | early | refused (not all done)
-- keeps: an entry appended since the owner looked keeps its slice alive. Without the two seconds of grace the
--   current second would be dropped and created again repeatedly.
local now = now_us()
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return {now, 'fenced'} end
if not same_incarnation(KEYS[2], ARGV[2], tonumber(ARGV[3])) then return {now, 'stale'} end
if (ARGV[4] + 2000) * 1000 > now then return {now, 'early'} end
local length = redis.call('LLEN', KEYS[3])
if length > 0 then
  -- BITPOS of a missing key is 0 even when it searches for a clear bit.
  local first_open = redis.call('EXISTS', KEYS[5]) == 1 and redis.call('BITPOS', KEYS[5], 0) or 0
  if first_open < length then return {now, 'refused'} end
end
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('UNLINK', KEYS[3], KEYS[4], KEYS[5], KEYS[6])
if ARGV[5] ~= '' then redis.call('HSET', KEYS[7], ARGV[2], ARGV[5]) end
return {now, 'ok'}
