-- A put whose reply was lost is sent again, and its entry then stands in the slice more than once. The first of all
-- copies is the task; the others are repeats, which the owner sorts out and counts. Resent copies are marked, so only
-- those have to be searched for: the original differs from them by that mark alone.
local function is_resent(row) return math.floor(string.byte(row, 5) / 4) % 2 == 1 end

local function first_copy(s, row, index)
  if not is_resent(row) then return index end
  local original = string.sub(row, 1, 4) .. string.char(string.byte(row, 5) - 4) .. string.sub(row, 6)
  local resent = redis.call('LPOS', s, row) or index
  return math.min(redis.call('LPOS', s, original) or resent, resent)
end

-- Where the task went whose copy this is, if it was moved away: of the first copy a mark is left then, which tells the id
-- and the new address (see bury). Asked only where something was fired, for those that were moved are marked as fired.
local moved_away = {}
local function mark_of(s, idh)
  local marks = moved_away[s]
  if not marks then
    marks = {}
    for first = 0, redis.call('LLEN', s) - 1, 1000 do
      for _, row in ipairs(redis.call('LRANGE', s, first, first + 999)) do
        if #row == 35 and math.floor(string.byte(row, 5) / 8) % 4 == 3 then marks[string.sub(row, 6, 21)] = row end
      end
    end
    moved_away[s] = marks
  end
  return marks[idh]
end

-- What is left of a task that stood at `first`. A tomb of a resent task keeps its header: the original may still arrive.
local function bury(s, row, index, first, marks, rest)
  local tomb = string.sub(row, 1, 4) .. string.char(string.byte(row, 5) % 8 + marks) .. string.sub(row, 6, 21) .. rest
  redis.call('LSET', s, first, tomb)
  if first ~= index then redis.call('LSET', s, index, tomb) end
end
