-- Tests set the clock: the caller appends its time in microseconds as the last argument.
local function now_us()
  return tonumber(ARGV[#ARGV])
end
