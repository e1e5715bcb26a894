-- Forget dead letters for good.
--
-- KEYS  dead, dead:t
-- ARGV  how many, then per letter: idh, time of its death in ms
-- returns 1 (dropped) or 0 (it is not there, or died again since) per letter
-- keeps: a letter that nobody has seen yet stays. The counter `dead` stays too: it counts deaths, not letters.
-- Looked at first, all of them: a set that is emptied on the way is gone, and cannot be asked while its slot is moving.
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
