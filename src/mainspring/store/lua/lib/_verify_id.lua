-- Check that an entry of the index leads to its task. Return nil if it does, otherwise the fault:
--   nothing   there is no task at that place, and none can have finished there yet
--   another   there is another task at that place
--   renewed   its task is there, but the slice has another incarnation since
-- A slice that is over and gone is no fault: the entry marks a finished id. A slice that has not ended is never
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
