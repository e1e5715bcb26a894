-- Forget that a handler was begun for a task.
--
-- KEYS  its record
-- ARGV  the mark that the run left there
-- returns 1 if it was forgotten, 0 if there is another record by now
-- keeps: a failed run does not remove the record of another run, which may have begun, or finished, since.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
