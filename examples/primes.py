"""What `make run` runs in a sandbox: a little work, a file, a look around."""
import os
import platform
import socket

primes = [n for n in range(2, 2000) if all(n % d for d in range(2, int(n**0.5) + 1))]
with open("/home/user/primes.txt", "w") as f:
    f.write("\n".join(map(str, primes)))
print(f"{len(primes)} primes below 2000, the last is {primes[-1]}")
print(f"kernel {platform.release()}, user {os.environ['USER']}, pid {os.getpid()}")
try:
    socket.create_connection(("192.0.2.1", 443), timeout=5)
    print("the network is open: this must not happen")
except OSError as e:
    print(f"the network is closed: {e}")
