-- Note how runs of schedules ended: new next values of chains that have not changed.
--
-- KEYS  next
-- ARGV  per schedule: name, new next value
-- returns how many were written
-- keeps: a chain that has advanced, or was edited, is left alone (the first 12 bytes are compared).
local written = 0
for i = 1, #ARGV - #ARGV % 2, 2 do
  local have = redis.call('HGET', KEYS[1], ARGV[i])
  if have and string.sub(have, 1, 12) == string.sub(ARGV[i + 1], 1, 12) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    written = written + 1
  end
end
return written
