-- Enter the ids of entries that were just appended into the index: the last step of a bulk put with ids.
--
-- Runs in one transaction after ZADD NX of the slices and RPUSH of the entries: entries that do not have to cross into
-- Lua cost a third less. An entry whose id is already known is taken out again before any caller can see it.
--
-- KEYS  n, slices, ids, s of each place
-- ARGV  the idhs of all entries, 16 bytes each, in the order of the places; then per place: name, address prefix, count
-- returns what put_ids returns: {{incarnation, index of the first new entry per place}, {position, address per entry
--   whose id was known}}; positions count all entries from 1
-- keeps: the index and the list change together, so a repeated request is one task.
local n, slices, ids = KEYS[1], KEYS[2], KEYS[3]
local places, idhs, sub, pack = #KEYS - 3, {}, string.sub, struct.pack
for i = 1, #ARGV[1] / 16 do idhs[i] = sub(ARGV[1], i * 16 - 15, i * 16) end
local known = redis.call('HMGET', ids, unpack(idhs))
local put, taken, pairs_, p, at = {}, {}, {}, 0, 0

-- Take known ids out of the last rows of a list again; a slice that has no other rows is removed too.
local function keep_new(s, name, first, count)
  local rows, new = redis.call('LRANGE', s, first, -1), {}
  for i = 1, count do
    if not known[at + i] then new[#new + 1] = rows[i] end
  end
  if first == 0 then redis.call('DEL', s) else redis.call('LTRIM', s, 0, first - 1) end
  if #new > 0 then redis.call('RPUSH', s, unpack(new))
  elseif first == 0 then redis.call('ZREM', slices, name) end
end

for place = 1, places do
  local name, count, s = ARGV[place * 3 - 1], tonumber(ARGV[place * 3 + 1]), KEYS[3 + place]
  local first = redis.call('LLEN', s) - count
  local incarnation = incarnation_of(slices, name)
  local head, index = ARGV[place * 3] .. pack('>I3', incarnation), first
  for i = at + 1, at + count do
    if known[i] then taken[#taken + 1], taken[#taken + 2] = i, known[i]
    else
      pairs_[p + 1], pairs_[p + 2], p = idhs[i], pack('>c10I4', head, index), p + 2
      index = index + 1
    end
  end
  if index - first < count then keep_new(s, name, first, count) end
  if index == first then incarnation, first = 0, 0 end
  put[place * 2 - 1], put[place * 2] = incarnation, first
  at = at + count
end
if p > 0 then
  redis.call('HSET', ids, unpack(pairs_, 1, p))
  redis.call('HINCRBY', n, 'accepted', p / 2)
end
return {put, taken}
