-- Forget dead letters for good.
--
-- KEYS  dead, dead:t
-- ARGV  how many, then per letter: idh, time of its death in ms
-- returns 1 (dropped) or 0 (it is not there, or died again since) per letter
-- keeps: a letter that nobody has seen yet stays. The counter `dead` stays too: it counts deaths, not letters.
local out = {}
for i = 1, tonumber(ARGV[1]) do
  local idh = ARGV[i * 2]
  local died = redis.call('ZSCORE', KEYS[2], idh)
  local known = died and tonumber(died) == tonumber(ARGV[i * 2 + 1])
  out[i] = known and 1 or 0
  if known then
    redis.call('HDEL', KEYS[1], idh)
    redis.call('ZREM', KEYS[2], idh)
  end
end
return out
