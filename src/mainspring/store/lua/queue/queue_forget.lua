-- Remove queues of one partition that are empty and that no worker has read for a while.
--
-- KEYS  queues; the stream of each queue
-- ARGV  that while in ms, then the name of each queue
-- returns how many were removed
-- Needs no token: an empty stream holds nothing, and the next hand-off creates it again. The check and the removal are one
-- step, so a task handed off at this moment finds the stream either present or gone.
local before = math.floor(now_us() / 1000) - tonumber(ARGV[1])
local removed = 0
for q = 2, #KEYS do
  local stream, idle = KEYS[q], true
  if redis.call('EXISTS', stream) == 1 then
    idle = redis.call('XLEN', stream) == 0
    local group = idle and redis.call('XINFO', 'GROUPS', stream)[1] or {}
    for i = 1, #group, 2 do
      if group[i] == 'last-delivered-id' then idle = idle and tonumber(string.match(group[i + 1], '^%d+')) <= before end
    end
  end
  if idle then
    redis.call('SREM', KEYS[1], ARGV[q])
    redis.call('UNLINK', stream)
    removed = removed + 1
  end
end
return removed
