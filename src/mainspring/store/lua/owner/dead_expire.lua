-- Drop the oldest dead letters of a partition: those past an age, and those beyond a number.
--
-- KEYS  dead, dead:t
-- ARGV  age in ms, number (for each, 0 = no bound), limit of dead letters to drop
-- returns {dropped by age, dropped by number}
-- Needs no token: the server's clock decides what is too old, and a call of a former owner drops nothing else.
-- keeps: the counter `dead`, which counts deaths, not dead letters.
local age, most, limit = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local old = {}
if age > 0 then
  local before = string.format('(%.0f', math.floor(now_us() / 1000) - age)
  old = redis.call('ZRANGE', KEYS[2], '-inf', before, 'BYSCORE', 'LIMIT', 0, limit)
end
local aged = #old
if most > 0 then
  local over = math.min(redis.call('ZCARD', KEYS[2]) - most, limit)
  if over > aged then old = redis.call('ZRANGE', KEYS[2], 0, over - 1) end
end
if #old > 0 then
  redis.call('HDEL', KEYS[1], unpack(old))
  redis.call('ZREM', KEYS[2], unpack(old))
end
return {aged, #old - aged}
