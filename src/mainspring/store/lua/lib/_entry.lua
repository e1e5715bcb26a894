-- Return whether the entry at this place still has the header that was read there. A cancelled entry has shrunk to the
-- first four bytes of its idh; that is enough to prove that the list below it is the one that was read.
local function same_header(entry, header)
  if not entry then return false end
  if #entry == 4 then return entry == header or entry == string.sub(header, 5, 8) end
  return string.sub(entry, 1, 4) .. string.sub(entry, 6, 21) == header
end

-- The incarnation of a slice: its score, compared as a number because servers print doubles differently.
local function same_incarnation(slices, name, g)
  local score = redis.call('ZSCORE', slices, name)
  return score and tonumber(score) == g
end

-- Return whether the list is the one the owner read. m is the index of its last row; below 0 an earlier call has proven
-- it all: had the server lost rows since, it would have lost that call too, and the sequence number would have shown it.
local function proven(slices, s, name, g, m, header)
  if tonumber(m) < 0 then return true end
  return same_incarnation(slices, name, tonumber(g)) and same_header(redis.call('LINDEX', s, m), header)
end
