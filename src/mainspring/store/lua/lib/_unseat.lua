-- Make the owner of a partition forget what it has read: its next write is refused like a former owner's. It keeps its
-- lease, so it takes the partition again at once, and reads everything again.
local function unseat(own, fence)
  if redis.call('EXISTS', own) == 1 then redis.call('HSET', own, 'token', '') end
  redis.call('DEL', fence)
end
