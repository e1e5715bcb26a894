-- Renew the leases of tasks of one partition whose worker is alive.
--
-- KEYS  queued; the stream of each queue
-- ARGV  how many of each queue, then per task, queue by queue: idh, stream id, its place in `queued` with the claim
-- returns {position, 'lost' | 'cancel' ...}: tasks that another worker has by now, and tasks to cancel
local out, i = {}, 0
local first = #KEYS - 1
for q = 1, #KEYS - 1 do
  local ids = {}
  for _ = 1, tonumber(ARGV[q]) do
    i = i + 1
    local at = first + (i - 1) * 3
    local known, claim = redis.call('HGET', KEYS[1], ARGV[at + 1]), ARGV[at + 3]
    if known == claim or known == claim .. '!' then ids[#ids + 1] = ARGV[at + 2] end
    if known ~= claim then out[#out + 1], out[#out + 2] = i, known == claim .. '!' and 'cancel' or 'lost' end
  end
  for from = 1, #ids, 1000 do
    local call = {'XCLAIM', KEYS[q + 1], 'w', 'w', 0}
    for j = from, math.min(from + 999, #ids) do call[#call + 1] = ids[j] end
    call[#call + 1] = 'JUSTID'
    redis.call(unpack(call))
  end
end
return out
