-- Does an entry of the index lead to its task? Returns nil when all is well, else what is wrong:
--   nothing   no task stands there, and none can have finished there yet
--   another   another task stands there
--   renewed   its task stands there, but the slice has another incarnation since
-- A slice that is over and gone is no fault: the entry is the mark of a finished id. One that has not ended is never
-- dropped, so an entry that leads into it must find its task.
local function fault_of(idh, address, s, score, end_ms, now_ms)
  local r, index = struct.unpack('>I3I4', string.sub(address, 8))
  local row = score and redis.call('LINDEX', s, index)
  local whole = row and string.sub(row, 6, 21) == idh
  if score and (score - math.floor(score)) * 1048576 == r then
    if whole or (row and #row == 4 and row == string.sub(idh, 1, 4)) then return nil end
    return row and 'another' or 'nothing'
  end
  if whole then return 'renewed' end
  if end_ms > now_ms then return 'nothing' end
  return nil
end
