-- Forget ids that finished longer ago than the dedupe window.
--
-- KEYS  slices, ids, holds, queued
-- ARGV  the window in ms, then pairs of idh, address as they were read
-- returns how many were removed
-- The server's clock decides: a node whose clock ran ahead by an hour would forget all finished ids.
-- Needs no token: an id is removed only while its address is unchanged and its slice is gone for good.
local before, gone = math.floor(now_us() / 1000) - tonumber(ARGV[1]), {}
local widths = {3600000, 1000, 50, 1, 4294967296}
for i = 2, #ARGV - 1, 2 do
  local width, high, low, r = struct.unpack('>BI2I4I3', ARGV[i + 1])
  local start = high * 4294967296 + low
  local name = string.format('%.0f.%.0f', widths[width + 1], start)
  -- The name of a hold slice does not say when its tasks ended: its record is kept for the window.
  local over = start + widths[width + 1] < before
  if width == 4 then over = redis.call('HEXISTS', KEYS[3], name) == 0 end
  if over and redis.call('HGET', KEYS[2], ARGV[i]) == ARGV[i + 1] then
    -- A task that is in a queue or runs is not over, though its slice may be.
    local place = redis.call('HGET', KEYS[4], ARGV[i])
    local in_queue = place and string.sub(place, 1, 14) == ARGV[i + 1]
    if not in_queue and not same_incarnation(KEYS[1], name, math.floor(start / 1000) + r / 1048576) then
      gone[#gone + 1] = ARGV[i]
    end
  end
end
for first = 1, #gone, 1000 do redis.call('HDEL', KEYS[2], unpack(gone, first, math.min(first + 999, #gone))) end
return #gone
