-- Return tasks that a worker has taken but not begun: other workers can take them at once.
--
-- KEYS  queued; the stream of each queue
-- ARGV  how many of each queue, then per task, queue by queue: idh, stream id, its place in `queued` with the claim,
--         queue
-- returns {position, 'lost' | 'cancel' ...}: tasks that another worker has by now, and tasks to cancel; both stay as
--   they are
-- keeps: a task is in the stream once, and this was no delivery. A task that workers died with before keeps its place and
--   its number of deliveries, and is made idle enough to be reclaimed: a task that ends every worker must stay counted.
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
