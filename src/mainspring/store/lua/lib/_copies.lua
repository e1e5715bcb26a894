-- A put whose reply was lost is sent again, and its entry is then in the slice more than once. The first of all copies
-- is the task; the others are repeats, which the owner finds and counts. Resent copies are marked, so a search is needed
-- only for those: the original differs from them by that mark alone.
local function is_resent(row) return math.floor(string.byte(row, 5) / 4) % 2 == 1 end

local function first_copy(s, row, index)
  if not is_resent(row) then return index end
  local original = string.sub(row, 1, 4) .. string.char(string.byte(row, 5) - 4) .. string.sub(row, 6)
  local resent = redis.call('LPOS', s, row) or index
  return math.min(redis.call('LPOS', s, original) or resent, resent)
end

-- The new address of the task of a resent copy, if the task was moved: the first copy is then a mark with the id and the
-- new address (see bury). Needed only for slices with fired bits, because a move sets the fired bit.
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

-- Leave the remains of a task at `first`. A resent task's tombstone keeps its header: the original may still arrive.
local function bury(s, row, index, first, marks, rest)
  local tombstone = string.sub(row, 1, 4) .. string.char(string.byte(row, 5) % 8 + marks) .. string.sub(row, 6, 21) .. rest
  redis.call('LSET', s, first, tombstone)
  if first ~= index then redis.call('LSET', s, index, tombstone) end
end
