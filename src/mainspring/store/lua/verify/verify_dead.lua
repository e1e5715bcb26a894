-- Find dead letters, by idh, that have a record and no time, or a time and no record.
--
-- KEYS  dead, dead:t
-- ARGV  count, their idhs
-- returns {position, 'record' | 'time' ...}: the half that exists, for those that lack the other
local count = tonumber(ARGV[1])
local times = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, 2, count + 1))
local out = {}
for i = 1, count do
  local there = redis.call('HEXISTS', KEYS[1], ARGV[i + 1]) == 1
  if there ~= (times[i] ~= false) then out[#out + 1], out[#out + 2] = i, there and 'record' or 'time' end
end
return out
