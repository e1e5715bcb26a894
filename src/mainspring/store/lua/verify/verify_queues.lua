-- Check that tasks of a queue are both in its stream and among the queued ones.
--
-- KEYS  queued; the stream of the queue
-- ARGV  count, then per task: idh, stream id
-- returns {position, 'entry' | 'place' ...}: the half that exists, for those that lack the other
local out = {}
for i = 1, tonumber(ARGV[1]) do
  local idh, id = ARGV[i * 2], ARGV[i * 2 + 1]
  local place = redis.call('HGET', KEYS[1], idh)
  local placed = place and string.sub(place, 15, 15 + #id) == id .. ' '
  local there = redis.call('XRANGE', KEYS[2], id, id)[1] ~= nil
  if there and not placed then out[#out + 1], out[#out + 2] = i, 'entry' end
  if placed and not there then out[#out + 1], out[#out + 2] = i, 'place' end
end
return out
