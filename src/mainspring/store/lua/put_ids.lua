-- Put tasks that carry the caller's ids into one partition; an id that is known already is left alone.
--
-- KEYS  n, slices; s of each place; ids of each bucket
-- ARGV  places, buckets, then
--         per place: name, score, address prefix
--         per bucket: count, then count times: place (from 1), idh, entry
-- returns {{incarnation per place}, {per entry in the order given: its index, or the address known for its id}}
-- keeps: the index and the list change together, so a repeated request is one task.
local n, slices = KEYS[1], KEYS[2]
local places, buckets = tonumber(ARGV[1]), tonumber(ARGV[2])
local a, out, created = 2 + places * 3, {}, 0
local rows, fresh = {}, {}
for place = 1, places do rows[place] = {} end

-- Lua cannot spread more than some thousand values; a call that failed on that half-way would leave half its work.
local function known_of(ids, idhs)
  local known = {}
  for first = 1, #idhs, 1000 do
    local some = redis.call('HMGET', ids, unpack(idhs, first, math.min(first + 999, #idhs)))
    for i = 1, #some do known[first + i - 1] = some[i] end
  end
  return known
end

for bucket = 1, buckets do
  local count = tonumber(ARGV[a + 1])
  local idhs = {}
  for i = 0, count - 1 do idhs[i + 1] = ARGV[a + 3 + i * 3] end
  local known = known_of(KEYS[2 + places + bucket], idhs)
  for i = 0, count - 1 do
    if known[i + 1] then
      out[#out + 1] = known[i + 1]
    else
      local place = tonumber(ARGV[a + 2 + i * 3])
      local list = rows[place]
      list[#list + 1] = ARGV[a + 4 + i * 3]
      out[#out + 1] = false
      fresh[#fresh + 1] = {#out, bucket, idhs[i + 1], place, #list}
    end
  end
  a = a + 1 + count * 3
end
local incarnation, base = {}, {}
for place = 1, places do
  local list = rows[place]
  if #list > 0 then
    incarnation[place] = open_slice(slices, ARGV[place * 3], ARGV[place * 3 + 1])
    local length = 0
    for first = 1, #list, 1000 do
      length = redis.call('RPUSH', KEYS[2 + place], unpack(list, first, math.min(first + 999, #list)))
    end
    base[place] = length - #list
    created = created + #list
  else
    incarnation[place] = 0
  end
end
local i = 1
while i <= #fresh do
  local bucket, pairs_ = fresh[i][2], {}
  while i <= #fresh and fresh[i][2] == bucket and #pairs_ < 2000 do
    local item = fresh[i]
    local place, index = item[4], base[item[4]] + item[5] - 1
    out[item[1]] = index
    pairs_[#pairs_ + 1] = item[3]
    pairs_[#pairs_ + 1] = ARGV[place * 3 + 2] .. struct.pack('>I3I4', incarnation[place], index)
    i = i + 1
  end
  redis.call('HSET', KEYS[2 + places + bucket], unpack(pairs_))
end
if created > 0 then redis.call('HINCRBY', n, 'accepted', created) end
return {incarnation, out}
