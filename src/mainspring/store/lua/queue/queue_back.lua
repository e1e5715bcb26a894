-- Put work back that a worker has taken and not begun: it is there for others at once.
--
-- KEYS  queued; the stream of each queue
-- ARGV  how many of each queue, then per task, queue by queue: idh, stream id, its place in `queued` with the claim,
--         queue
-- returns {position, 'lost' | 'cancel' ...}: what is another's by now, and what is to be cancelled; both stay as they are
-- keeps: it is in the stream once: this was no delivery. One that workers died with before stays where it is, with the number
--   of its deliveries, and is idle enough to be taken over: what ends every worker must not begin to count anew.
local out, i = {}, 0
local LONG_IDLE = 86400000
local first = #KEYS - 1
for q = 1, #KEYS - 1 do
  local stream, places, gone = KEYS[q + 1], {}, {}
  for _ = 1, tonumber(ARGV[q]) do
    i = i + 1
    local at = first + (i - 1) * 4
    local idh, id, claim = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
    local known = redis.call('HGET', KEYS[1], idh)
    local found = known == claim and redis.call('XRANGE', stream, id, id)
    if found and found[1] then
      local record, new = found[1][2][2], id
      local pending = redis.call('XPENDING', stream, 'w', id, id, 1)
      local times = pending[1] and pending[1][4] or 1
      if times > 1 then
        redis.call('XCLAIM', stream, 'w', 'w', 0, id, 'IDLE', LONG_IDLE, 'RETRYCOUNT', times - 1, 'JUSTID')
      else
        new = redis.call('XADD', stream, '*', 'e', record)
        gone[#gone + 1] = id
      end
      places[#places + 1] = idh
      places[#places + 1] = address_of(record) .. new .. ' ' .. ARGV[at + 4]
    else
      out[#out + 1], out[#out + 2] = i, known == claim .. '!' and 'cancel' or 'lost'
    end
  end
  spread(places, #places, 'HSET', KEYS[1])
  spread(gone, #gone, 'XACK', stream, 'w')
  spread(gone, #gone, 'XDEL', stream)
end
return out
