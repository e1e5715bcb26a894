-- Repair a task of a queue that is only in its stream, or only among the queued ones.
--
-- KEYS  queued; its stream; slices; s, d of the slice it came from; own, fence
-- ARGV  idh, stream id, queue
-- returns 'fine' (it has changed by now) | 'placed' | 'again' (it is fired, and handed off again by the owner)
--   | 'lost' (its entry is gone)
-- keeps: no entry of a stream or of a slice is removed.
local queued, stream, slices, s, d, own, fence = unpack(KEYS, 1, 7)
local idh, id = ARGV[1], ARGV[2]
local place = redis.call('HGET', queued, idh)
local placed = place and string.sub(place, 15, 15 + #id) == id .. ' '
local entry = redis.call('XRANGE', stream, id, id)[1]
if (entry ~= nil) == (placed or false) then return 'fine' end
if entry then
  if place then return 'fine' end
  redis.call('HSET', queued, idh, address_of(entry[2][2]) .. id .. ' ' .. ARGV[3])
  return 'placed'
end
local name, g, index = place_of(address_of(place))
local row = same_incarnation(slices, name, g) and redis.call('LINDEX', s, index)
local there = row and string.sub(row, 6, 21) == idh
if there then
  redis.call('SETBIT', d, index, 0)
  unseat(own, fence)
end
redis.call('HDEL', queued, idh)
return there and 'again' or 'lost'
