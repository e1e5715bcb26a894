-- Forget ids that finished longer ago than the dedupe window.
--
-- KEYS  slices, ids of each bucket
-- ARGV  forget what was due before this time in ms
-- returns {removed, left}
-- Needs no token: an id is removed only when its slice is gone for good, whoever asks.
local removed, left = 0, 0
local before = tonumber(ARGV[1])
local widths = {3600000, 1000, 50, 1}
for i = 2, #KEYS do
  local all, gone = redis.call('HGETALL', KEYS[i]), {}
  for at = 1, #all, 2 do
    local width, high, low, r = struct.unpack('>BI2I4I3', all[at + 1])
    local start = high * 4294967296 + low
    left = left + 1
    if start + widths[width + 1] < before then
      local name = string.format('%.0f.%.0f', widths[width + 1], start)
      if not same_incarnation(KEYS[1], name, math.floor(start / 1000) + r / 1048576) then gone[#gone + 1] = all[at] end
    end
  end
  for first = 1, #gone, 1000 do
    redis.call('HDEL', KEYS[i], unpack(gone, first, math.min(first + 999, #gone)))
  end
  removed, left = removed + #gone, left - #gone
end
return {removed, left}
