-- Mark a task that was handed off as cancelled where it came from, if that slice is still there, and forget its id as
-- cancel.lua does. The caller counts it.
local function call_off(slices, ids, x, idh, address)
  local name, g, index = place_of(address)
  if same_incarnation(slices, name, g) then redis.call('SETBIT', x, index, 1) end
  if redis.call('HGET', ids, idh) == address then redis.call('HDEL', ids, idh) end
end
