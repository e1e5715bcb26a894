-- Give work of one partition to a worker.
--
-- KEYS  queued; the stream of each queue
-- ARGV  the claim ("<worker>/<nonce>"), then per queue: name, how many at most
-- returns {time in us, {queue (counted from 1), stream id, record ...}}
-- keeps: what a worker got nobody else gets before its lease is over, and only its claim can end it.
local now, queued = now_us(), KEYS[1]
local claim = ' ' .. ARGV[1] .. '/' .. string.format('%.0f', math.floor(now / 1000))
local out, places = {}, {}
for q = 1, #KEYS - 1 do
  local stream, name, most = KEYS[q + 1], ARGV[q * 2], ARGV[q * 2 + 1]
  if redis.call('EXISTS', stream) == 1 then
    local read = redis.call('XREADGROUP', 'GROUP', 'w', 'w', 'COUNT', most, 'STREAMS', stream, '>')
    for _, entry in ipairs(read and read[1] and read[1][2] or {}) do
      local id, record = entry[1], entry[2][2]
      out[#out + 1], out[#out + 2], out[#out + 3] = q, id, record
      places[#places + 1] = idh_in(record)
      places[#places + 1] = address_of(record) .. id .. ' ' .. name .. claim
    end
  end
end
spread(places, 'HSET', queued)
return {now, out}
