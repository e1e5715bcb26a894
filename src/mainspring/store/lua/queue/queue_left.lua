-- Count tasks whose worker's lease has expired. A worker has to ask for slots before it reclaims them.
--
-- KEYS  the stream of each queue
-- ARGV  the lease in ms, limit per queue
-- returns the number per queue
local out = {}
for q = 1, #KEYS do
  local there = redis.call('EXISTS', KEYS[q]) == 1
  out[q] = there and #redis.call('XPENDING', KEYS[q], 'w', 'IDLE', ARGV[1], '-', '+', ARGV[2]) or 0
end
return out
