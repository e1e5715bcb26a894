-- Make the owner of a partition forget what it has read: its next write is refused as a former owner's. It keeps its
-- lease, so it is the one that takes the partition again, at once, and reads everything anew.
local function unseat(own, fence)
  if redis.call('EXISTS', own) == 1 then redis.call('HSET', own, 'token', '') end
  redis.call('DEL', fence)
end
