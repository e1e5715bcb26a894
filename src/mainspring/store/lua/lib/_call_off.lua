-- Mark tasks that were handed off as cancelled in their original slices, if those still exist, and forget their ids as
-- cancel.lua does. Each is {idh, address, key of x}; the caller counts them. Read everything before the first id is
-- removed: a hash that becomes empty is gone, and cannot be read while its slot is moving to another server.
local function call_off(slices, ids, tasks)
  local known, gone = {}, {}
  for i, task in ipairs(tasks) do known[i] = redis.call('HGET', ids, task[1]) end
  for i, task in ipairs(tasks) do
    local name, g, index = place_of(task[2])
    if same_incarnation(slices, name, g) then redis.call('SETBIT', task[3], index, 1) end
    if known[i] == task[2] then gone[#gone + 1] = task[1] end
  end
  spread(gone, #gone, 'HDEL', ids)
end
