"""The program that `make run` runs in a sandbox."""
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
    print("error: the network can be reached")
except OSError as e:
    print(f"the network cannot be reached: {e}")
