-- Cut off bits past the end of a slice's list: a task appended there would look finished.
--
-- KEYS  slices, s, n, own, fence; f, d, x
-- ARGV  name, score
-- returns 'changed' (another incarnation), or how many bitmaps were cut
-- keeps: bits of entries stay. The owner holds these bitmaps in memory and would write them back, so it has to read again.
if not same_incarnation(KEYS[1], ARGV[1], tonumber(ARGV[2])) then return 'changed' end
local length = redis.call('LLEN', KEYS[2])
local whole, rest, cut = math.floor(length / 8), length % 8, 0
for i = 6, 8 do
  local bits = redis.call('GET', KEYS[i])
  if bits then
    local kept = string.sub(bits, 1, whole)
    if rest > 0 and #bits > whole then
      local last = string.byte(bits, whole + 1)
      kept = kept .. string.char(last - last % 2 ^ (8 - rest))
    end
    if kept ~= string.sub(bits, 1, #kept) or string.find(bits, '[^%z]', #kept + 1) then
      redis.call('SET', KEYS[i], kept)
      cut = cut + 1
    end
  end
end
if cut > 0 then
  unseat(KEYS[4], KEYS[5])
  redis.call('HINCRBY', KEYS[3], 'repairs', 1)
end
return cut
