-- Check whether this owner may write. The fence holds "<token>:<seq>" of the last call that wrote; `wanted` is the value
-- that this call would leave. Return nil, or the reason against it:
--   fenced       another owner has the partition
--   repeated     this same call was done before and its reply was lost: write nothing, answer the reads again
--   rolledback   the server forgot a call that it had answered: a failover lost state
local function judge(fence, wanted)
  local token, seq = string.match(wanted, '^(.*):(%d+)$')
  if not fence or string.sub(fence, 1, #token + 1) ~= token .. ':' then return 'fenced' end
  local have = tonumber(string.sub(fence, #token + 2))
  seq = tonumber(seq)
  if seq <= have then return 'repeated' end
  if seq > have + 1 then return 'rolledback' end
  return nil
end
