-- Forget the records of holds that ended longer ago than the dedupe window.
--
-- KEYS  holds
-- ARGV  the window in ms, then pairs of the name of a hold slice that is gone and the time in ms when it ended
-- returns how many were forgotten, from the first on
-- The server's clock decides, as it does for the ids (sweep.lua): without the record of its hold an id counts as over, and
--   a node whose clock ran ahead would release ids that are still within their window.
local before, gone = math.floor(now_us() / 1000) - tonumber(ARGV[1]), {}
for i = 2, #ARGV - 1, 2 do
  if tonumber(ARGV[i + 1]) >= before then break end
  gone[#gone + 1] = ARGV[i]
end
if #gone > 0 then redis.call('HDEL', KEYS[1], unpack(gone)) end
return #gone
