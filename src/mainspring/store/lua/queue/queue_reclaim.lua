-- Give a worker tasks that other workers took and whose lease has expired.
--
-- KEYS  queued; the stream of each queue
-- ARGV  the claim ("<worker>/<nonce>"), the lease in ms, then per queue: name, how many at most
-- returns {time in us, {queue (counted from 1), stream id, record, how often it was taken, 1 if it is to be cancelled ...}}
-- keeps: the claim of the former worker cannot end the run any more.
local now, queued = now_us(), KEYS[1]
local claim = ' ' .. ARGV[1] .. '/' .. string.format('%.0f', math.floor(now / 1000))
local out, places = {}, {}

local function take(q, stream, name, id, record)
  local idh = idh_in(record)
  local place = address_of(record) .. id .. ' ' .. name
  local known = redis.call('HGET', queued, idh) or place
  if string.sub(known, 1, #place) ~= place then return end
  local cancel = string.sub(known, -1) == '!'
  local pending = redis.call('XPENDING', stream, 'w', id, id, 1)
  places[#places + 1] = idh
  places[#places + 1] = place .. claim .. (cancel and '!' or '')
  for _, value in ipairs({q, id, record, pending[1] and pending[1][4] or 1, cancel and 1 or 0}) do out[#out + 1] = value end
end

for q = 1, #KEYS - 1 do
  local stream, name, left = KEYS[q + 1], ARGV[q * 2 + 1], tonumber(ARGV[q * 2 + 2])
  local cursor, rounds = '0-0', 0
  while left > 0 and rounds < 20 and redis.call('EXISTS', stream) == 1 do
    local found = redis.call('XAUTOCLAIM', stream, 'w', 'w', ARGV[2], cursor, 'COUNT', left)
    for _, entry in ipairs(found[2]) do
      if entry then
        take(q, stream, name, entry[1], entry[2][2])
        left = left - 1
      end
    end
    cursor, rounds = found[1], rounds + 1
    if cursor == '0-0' then break end
  end
end
spread(places, #places, 'HSET', queued)
return {now, out}
