-- May this owner write? Returns nil, or why not:
--   fenced       another owner has the partition
--   repeated     this very call was done before and its reply was lost: write nothing, answer the reads again
--   rolledback   the server forgot a call that it had answered: a failover lost state
local function fence(own, token, seq)
  local stored = redis.call('HMGET', own, 'token', 'seq')
  if stored[1] ~= token then return 'fenced' end
  local have = tonumber(stored[2])
  if seq <= have then return 'repeated' end
  if seq > have + 1 then return 'rolledback' end
  return nil
end
