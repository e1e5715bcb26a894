-- Cancel a task that is in a queue; if it runs, leave a mark for its worker.
--
-- KEYS  n, slices, ids, queued, acks; its stream; x of the slice it came from
-- ARGV  idh, its place in `queued` as it was read
-- returns 'cancelled' | 'cancelling' (it runs; its worker is asked to stop) | 'changed' (read its place again)
-- keeps: after 'cancelled' no worker gets it.
local n, slices, ids, queued, acks, stream, x = unpack(KEYS, 1, 7)
local idh, place = ARGV[1], ARGV[2]
if redis.call('HGET', queued, idh) ~= place then return 'changed' end
local address = address_of(place)
local id, claim = string.match(string.sub(place, 15), '^(%S+) %S+(.*)$')
if claim ~= '' then
  if string.sub(place, -1) ~= '!' then redis.call('HSET', queued, idh, place .. '!') end
  return 'cancelling'
end
local found = redis.call('XRANGE', stream, id, id)
if found[1] and in_lane(found[1][2][2]) then
  redis.call('HSET', acks, address, idh .. 'c')
  redis.call('HINCRBY', n, 'aside', -1)
else
  redis.call('HINCRBY', n, 'queued', -1)
end
redis.call('XACK', stream, 'w', id)
redis.call('XDEL', stream, id)
redis.call('HINCRBY', n, 'cancelled', 1)
call_off(slices, ids, {{idh, address, x}})
redis.call('HDEL', queued, idh)
return 'cancelled'
