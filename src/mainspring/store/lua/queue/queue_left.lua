-- Count what workers have taken and not kept: their lease is over. Whoever wants it has to ask for slots first.
--
-- KEYS  the stream of each queue
-- ARGV  the lease in ms, how many to count of each queue at most
-- returns how many there are, of each queue
local out = {}
for q = 1, #KEYS do
  local there = redis.call('EXISTS', KEYS[q]) == 1
  out[q] = there and #redis.call('XPENDING', KEYS[q], 'w', 'IDLE', ARGV[1], '-', '+', ARGV[2]) or 0
end
return out
