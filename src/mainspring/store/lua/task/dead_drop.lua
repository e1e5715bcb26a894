-- Forget dead letters for good.
--
-- KEYS  dead, dead:t
-- ARGV  count, then per dead letter: idh, time of its death in ms
-- returns 1 (dropped) or 0 (it does not exist, or the task died again since) per dead letter
-- keeps: a newer dead letter of the same task. The counter `dead` stays too: it counts deaths, not dead letters.
-- Read all of them first: a set that becomes empty is gone, and cannot be read while its slot is moving.
local out, count = {}, tonumber(ARGV[1])
for i = 1, count do
  local died = redis.call('ZSCORE', KEYS[2], ARGV[i * 2])
  out[i] = died and tonumber(died) == tonumber(ARGV[i * 2 + 1]) and 1 or 0
end
for i = 1, count do
  if out[i] == 1 then
    redis.call('HDEL', KEYS[1], ARGV[i * 2])
    redis.call('ZREM', KEYS[2], ARGV[i * 2])
  end
end
return out
