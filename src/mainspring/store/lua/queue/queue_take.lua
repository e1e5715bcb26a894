-- Give tasks of one partition to a worker.
--
-- KEYS  queued; the stream of each queue
-- ARGV  the claim ("<worker>/<nonce>"), then per queue: name, how many at most
-- returns {time in us, {queue (counted from 1), stream id, record ...}}
-- keeps: no other worker gets the task before the lease is over, and only the worker's claim can end the run.
local now, queued = now_us(), KEYS[1]
local claim = ' ' .. ARGV[1] .. '/' .. string.format('%.0f', math.floor(now / 1000))
local out, o, places, p = {}, 0, {}, 0
local sub = string.sub
for q = 1, #KEYS - 1 do
  local stream, name, most = KEYS[q + 1], ARGV[q * 2], ARGV[q * 2 + 1]
  if redis.call('EXISTS', stream) == 1 then
    -- A stream without its group was changed by hand; it must not keep the others from being read.
    local read = redis.pcall('XREADGROUP', 'GROUP', 'w', 'w', 'COUNT', most, 'STREAMS', stream, '>')
    local entries = read and read[1] and read[1][2] or {}
    local rest = ' ' .. name .. claim
    for i = 1, #entries do
      local id, record = entries[i][1], entries[i][2][2]
      out[o + 1], out[o + 2], out[o + 3] = q, id, record
      places[p + 1], places[p + 2] = sub(record, 20, 35), sub(record, 1, 14) .. id .. rest
      o, p = o + 3, p + 2
    end
  end
end
spread(places, p, 'HSET', queued)
return {now, out}
